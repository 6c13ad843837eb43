"""Docstring."""
import math
import torch  # keep

check()
from os import path
from pack._leangrpo import lean

class Ema:
    import json

def main():
    pass
