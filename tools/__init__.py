"""Programs of the repository that make and measure models, pictures and pages of the package."""
