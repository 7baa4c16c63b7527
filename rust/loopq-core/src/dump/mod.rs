//! Input rows, as they lie in memory or in a mapped safetensors file.

mod map;
mod tensor;

pub use map::MappedFile;

use crate::{dims, Error, Result};

/// The number type of activation rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
}

impl RowType {
    /// Bytes per value.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The safetensors name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }
}

/// Rows of `dim` values, row-major, as little-endian bytes at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    bytes: &'a [u8],
    dtype: RowType,
    n_rows: usize,
    dim: usize,
}

impl<'a> Rows<'a> {
    /// Views bytes as rows; their number must fit exactly.
    pub fn new(bytes: &'a [u8], dtype: RowType, n_rows: usize, dim: usize) -> Result<Self> {
        let need = dims::product("the rows", dims::product("the rows", n_rows, dim)?, dtype.size())?;
        if need != bytes.len() {
            return Err(Error::shape("the rows' bytes", need, bytes.len()));
        }
        Ok(Self { bytes, dtype, n_rows, dim })
    }

    /// Views single-precision rows.
    pub fn from_f32(values: &'a [f32], n_rows: usize, dim: usize) -> Result<Self> {
        Self::new(bytemuck::cast_slice(values), RowType::F32, n_rows, dim)
    }

    /// Views half-precision rows.
    pub fn from_f16(values: &'a [half::f16], n_rows: usize, dim: usize) -> Result<Self> {
        Self::new(bytemuck::cast_slice(values), RowType::F16, n_rows, dim)
    }

    /// Views rows of 16-bit patterns of the given type.
    pub fn from_bits16(values: &'a [u16], dtype: RowType, n_rows: usize, dim: usize) -> Result<Self> {
        Self::new(bytemuck::cast_slice(values), dtype, n_rows, dim)
    }

    /// The number type.
    #[must_use]
    pub fn dtype(&self) -> RowType {
        self.dtype
    }

    /// How many rows.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Values per row.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Bytes per row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.dim * self.dtype.size()
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Rows `from..from + n`; the caller keeps within the number of rows.
    #[must_use]
    pub fn slice(&self, from: usize, n: usize) -> Rows<'a> {
        let size = self.row_bytes();
        Rows { bytes: &self.bytes[from * size..(from + n) * size], n_rows: n, ..*self }
    }
}
