"""Files of TensorFlow's records: each is a sample, the features of its Example are the columns."""
