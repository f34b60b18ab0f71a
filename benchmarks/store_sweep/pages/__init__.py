"""Results of a sweep: lines of text, charts and a page."""
