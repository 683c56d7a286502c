"""Which bytes are alive at each instant of a step whose model torch compiles?"""
