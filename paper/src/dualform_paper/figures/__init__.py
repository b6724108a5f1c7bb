"""The paper's figures. How they are drawn comes from `dualform.figures`."""
