"""The commands `tune` and `train`, which `dflash-local` finds by the entry points of this
distribution. They import PyTorch only once they are called."""
