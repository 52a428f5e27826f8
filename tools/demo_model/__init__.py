"""The demo model: corpus, tokenizer, training and evaluation of the model that ships in ``quire.assets``."""
