"""Answers for readers: `view` prepares an answer once; `text`, `markdown`, `svg` and the web page only lay it out."""
