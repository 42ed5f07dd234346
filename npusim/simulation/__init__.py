"""From what is asked for to a result: request, inputs, bits and time, and how far they hang on what is assumed."""
