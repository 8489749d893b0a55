"""The back end `phalanx` of torch.distributed: its sources in C++, how they are compiled, how groups of it are made."""

BACKEND = "phalanx"  # its name
