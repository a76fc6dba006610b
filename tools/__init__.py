"""Programs of the checkout that make what the package ships."""
