"""Files of TensorFlow's records: each record is a sample, and its features are the columns."""
