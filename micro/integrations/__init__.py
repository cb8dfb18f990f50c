"""Other tools at hand of an attachment: loggers, which import no tool and work on the object that you give them, and
callbacks for frameworks that keep the training loop, whose modules import their framework. micro imports none of them.
"""
