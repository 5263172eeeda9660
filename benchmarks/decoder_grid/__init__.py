"""Decoders drawn at random from a grid of choices that training code makes, planned in many ways (`__main__`)."""
