"""Trial loads in a child process, for files and builds on which llama.cpp may abort."""
