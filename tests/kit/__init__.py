"""What tests have in common: `plugin` has fixtures that every test may ask for, `makers` makes a module's own ones."""
