"""Studies: many runs that are compared. Arms and seeds, what is checked first, who trains what."""
