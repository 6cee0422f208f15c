"""A corpus: files of text, rows, chats or tokens -> **samples**, one after the other."""
