"""Which kernels does a layer run that torch compiles by itself, in which order, and what do they have alive?"""
