"""What a deployment needs before it is built: sizes and money by arithmetic, tiers and policies by simulation."""
