"""Tests of `ottava.debug.watch`; a package, since other rooms have tests of the same names."""
