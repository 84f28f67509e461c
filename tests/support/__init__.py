"""Code that several test modules share. Tests import it; it imports no test module."""
