"""From a request to a result: request, inputs, bits and time, and their dependence on assumptions."""
