"""Programs of the checkout: they make what the package ships, and measure it."""
