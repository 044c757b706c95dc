"""The contenders beside ZeroPP; each gives the same Plan type and trains for real."""
