# Writes the fingerprint of a build: cmake -DOUTPUT=FILE -DROOT=core -DSOURCES=a;b;c -P fingerprint.cmake
#
# It is a hash of the version and of every source file that decides what ranks say to each other and what they compute.
# Ranks compare it before they share anything. It depends on names and contents only, so the same sources give the same
# fingerprint in a checkout, an sdist and a wheel, on every machine.
set(text "")
foreach(source IN LISTS SOURCES)
  file(SHA256 ${ROOT}/${source} hash)
  string(APPEND text "${source} ${hash}\n")
endforeach()
string(SHA256 fingerprint "${text}")
string(SUBSTRING ${fingerprint} 0 16 fingerprint)
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define PHX_FINGERPRINT \"${fingerprint}\"\n" @ONLY)  # leaves an equal file alone
