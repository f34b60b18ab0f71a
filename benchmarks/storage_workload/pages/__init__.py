"""Pages: the document of a run, its verdict, its text and its charts."""
