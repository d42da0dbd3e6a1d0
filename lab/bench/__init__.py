"""`dflash-local bench` and what maintainers need beside it: models of random weights, given
answers, llama-server on the same files, and tables of all that was measured."""
