// Identity of the library.
#include "kernels.h"

// Returns the digest of the sources that this library was built from, see sources.py.
LADE_KERNEL const char* lade_sources() { return LADE_SOURCES; }
