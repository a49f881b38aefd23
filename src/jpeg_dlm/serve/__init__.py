"""`jpeg-dlm serve`: models behind HTTP, and a page that shows text form out of noise."""
