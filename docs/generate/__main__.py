"""Write the reference pages: `python -m docs.generate`."""

from docs.generate.reference import FOLDER, texts

for name, text in texts().items():
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
for path in set(FOLDER.rglob("*.md")) - {FOLDER / name for name in texts()}:
    path.unlink()
print(f"Wrote {len(texts())} pages to {FOLDER}")
