"""Needs of a deployment before it is built: sizes and money by arithmetic, tiers and policies by simulation."""
