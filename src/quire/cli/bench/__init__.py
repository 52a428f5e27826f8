"""`quire bench`, and the library of the scripts in benchmarks/."""
