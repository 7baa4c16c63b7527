//! Tensors of a mapped safetensors file, seen as rows. The `safetensors` crate reads and checks the header.

use std::path::Path;

use safetensors::{Dtype, SafeTensorError, SafeTensors};

use crate::dump::{MappedFile, RowType, Rows};
use crate::{Error, Result};

impl MappedFile {
    /// The rows of a tensor of shape (rows, dim); `path` is the name of this file in errors.
    pub fn rows(&self, path: &Path, tensor: &str, dim: usize) -> Result<Rows<'_>> {
        let file = SafeTensors::deserialize(self.bytes())
            .map_err(|e| Error::NoSafetensors { path: path.into(), reason: e.to_string() })?;
        let view = file.tensor(tensor).map_err(|e| match e {
            SafeTensorError::TensorNotFound(_) => {
                Error::NoTensor { path: path.into(), tensor: tensor.into() }
            }
            other => Error::NoSafetensors { path: path.into(), reason: other.to_string() },
        })?;
        let (found, shape) = (view.dtype(), view.shape());
        match (row_type(found), shape) {
            (Some(dtype), &[n_rows, width]) if width == dim => Rows::new(view.data(), dtype, n_rows, dim),
            _ => Err(Error::WrongTensor {
                path: path.into(),
                tensor: tensor.into(),
                expected: format!("BF16, F16 or F32 of shape [rows, {dim}]"),
                got: format!("{found:?} of shape {shape:?}"),
            }),
        }
    }
}

fn row_type(dtype: Dtype) -> Option<RowType> {
    match dtype {
        Dtype::F32 => Some(RowType::F32),
        Dtype::F16 => Some(RowType::F16),
        Dtype::BF16 => Some(RowType::Bf16),
        _ => None,
    }
}
