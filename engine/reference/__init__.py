"""The specification of each op and of its backward in plain torch: obvious, exact, chunked; one file per op."""
