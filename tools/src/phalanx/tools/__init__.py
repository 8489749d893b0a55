"""What developers use, and programs do not: the commands `phalanx bench`, `demo`, `trace`, `tune` and `verify`."""
