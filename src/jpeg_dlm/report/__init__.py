"""One page about runs, evaluations, comparisons and studies, as HTML and as Markdown."""
