"""A folder for trying out an agent, and example questions about it."""

from __future__ import annotations

FILES = {
    "readme.md": "Garden of the old school.\nowner: marten\nnext: plan/spring.md\n",
    "plan/spring.md": "Beans first, then peas.\nnext: plan/summer.md\n",
    "plan/summer.md": "crop: tomato\nWater in the evening.\n",
    "plan/winter.md": "Nothing grows.\ncrop: kale\n",
    "stock/spades.csv": "long\nshort\nflat\nround\n",
    "stock/seeds.csv": "bean\npea\nradish\n",
    "stock/north.txt": "plants: 412\n",
    "field/south.txt": "plants: 231\n",
    "garden.toml": '[pump]\nhost = "well-7"\nrate = "40"\n[log]\nlevel = "info"\n',
}
QUESTIONS = (
    "How many lines does stock/spades.csv have?",
    "Start with readme.md. Each file names the next one. What is the crop in the last one?",
    "Add the plants of stock/north.txt and field/south.txt.",
    "What is pump.rate in garden.toml?",
    "Write the value of pump.host in garden.toml to host.txt.",
)
