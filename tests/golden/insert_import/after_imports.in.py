"""Docstring."""
import math
import torch  # keep

check()
from os import path

class Ema:
    import json

def main():
    pass
