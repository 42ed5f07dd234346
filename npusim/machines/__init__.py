"""Machines: how the stages of an algorithm run on a core family, with one folder per family.

A machine chooses the storage of names by the routes of the device file, emits product stages and rows stages, and
orders them.  A machine names no algorithm, and an algorithm names no machine.
"""
