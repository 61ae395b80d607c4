"""Codecs: their errors, and their speed next to other libraries. perf/ is a C++ program (`make bench-codec`)."""
