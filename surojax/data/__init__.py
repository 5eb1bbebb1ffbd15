"""Turns text files into token arrays, and token arrays into batches."""
