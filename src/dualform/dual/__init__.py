"""The algebra: from a store's numbers to coefficients, initial parts, weights, and the certificate."""
