"""What developers use, and programs do not: the commands `phalanx bench`, `phalanx demo` and `phalanx verify`."""
