"""Collectives: communication between devices."""
