"""Every command of README.md and docs/**/*.md runs as printed, and prints what the page shows."""
