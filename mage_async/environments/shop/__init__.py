"""A shop in text: search, choose options, buy what a customer asked for (after WebShop)."""
