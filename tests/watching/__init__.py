"""Tests of `ottava.watching`; a package, since other rooms have tests of the same names."""
