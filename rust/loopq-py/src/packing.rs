//! Packed layouts.

use loopq_core::pack::{dense, marlin, w4};
use loopq_core::{grid, Error, Execution};
use numpy::PyArray2;
use pyo3::prelude::*;

use crate::arrays::{matrix, Codes, Matrix};
use crate::gil::{allow_threads, raise};

/// Codes or words, and scales.
type Layer<'py, T> = (Bound<'py, PyArray2<T>>, Bound<'py, PyArray2<f32>>);

/// Words as the int32 that other tools store.
fn as_i32(words: Vec<u32>) -> Vec<i32> {
    words.into_iter().map(u32::cast_signed).collect()
}

fn as_u32(words: &[i32]) -> &[u32] {
    bytemuck::cast_slice(words)
}

#[pyfunction]
#[pyo3(signature = (codes, bits, zero_offset = 0))]
pub(crate) fn pack_dense<'py>(
    py: Python<'py>,
    codes: &Bound<'py, PyAny>,
    bits: u32,
    zero_offset: i64,
) -> PyResult<Bound<'py, PyArray2<i32>>> {
    let codes = Codes::take(codes)?;
    if matches!(codes, Codes::Biased(_)) && zero_offset != 0 {
        let allowed = "0 for uint8 codes, which are biased already".to_string();
        return Err(raise(
            py,
            &Error::Setting { name: "zero_offset", got: zero_offset.to_string(), allowed },
        ));
    }
    let [rows, dim] = codes.shape();
    let n_words = dense::words(dim, bits).map_err(|e| raise(py, &e))?;
    let flat = codes.biased(bits, zero_offset)?;
    let words = allow_threads(py, |_| dense::pack(&flat?, rows, dim, bits))?;
    matrix(py, as_i32(words), [rows, n_words])
}

#[pyfunction]
#[pyo3(signature = (packed, bits, dim, zero_offset = 0))]
pub(crate) fn unpack_dense<'py>(
    py: Python<'py>,
    packed: &Bound<'py, PyAny>,
    bits: u32,
    dim: usize,
    zero_offset: i64,
) -> PyResult<Bound<'py, PyAny>> {
    let packed = Matrix::take("packed", packed)?;
    let ([rows, _], words) = (packed.shape(), as_u32(packed.values()?));
    let codes = allow_threads(py, |_| dense::unpack(words, rows, dim, bits))?;
    if zero_offset == 0 {
        return Ok(matrix(py, codes, [rows, dim])?.into_any());
    }
    let signed = grid::to_signed_by(&codes, zero_offset).map_err(|e| raise(py, &e))?;
    Ok(matrix(py, signed, [rows, dim])?.into_any())
}

#[pyfunction]
#[pyo3(signature = (codes, scales))]
pub(crate) fn marlin_pack<'py>(
    py: Python<'py>,
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
) -> PyResult<Layer<'py, i32>> {
    let codes = Codes::take(codes)?;
    let [n, k] = codes.shape();
    let scales = Matrix::take("scales", scales)?;
    let [_, n_groups] = scales.shape();
    scales.check_shape(py, "scales", [n, n_groups])?;
    let flat = codes.biased(4, 8)?;
    let scales = scales.values()?;
    let (words, stored) =
        allow_threads(py, |_| Ok((marlin::pack(&flat?, k, n)?, marlin::pack_scales(scales, n, n_groups)?)))?;
    Ok((matrix(py, as_i32(words), [k / 16, 2 * n])?, matrix(py, stored, [n_groups, n])?))
}

#[pyfunction]
#[pyo3(signature = (packed, scales))]
pub(crate) fn marlin_unpack<'py>(
    py: Python<'py>,
    packed: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
) -> PyResult<Layer<'py, i8>> {
    let (packed, scales) = (Matrix::take("packed", packed)?, Matrix::take("scales", scales)?);
    let ([bands, width], [n_groups, _]) = (packed.shape(), scales.shape());
    let (k, n) = (bands.saturating_mul(16), width / 2);
    scales.check_shape(py, "scales", [n_groups, n])?;
    let words = as_u32(packed.values()?);
    let stored = scales.values()?;
    let (codes, scales) = allow_threads(py, |_| {
        Ok((marlin::unpack(words, k, n)?, marlin::unpack_scales(stored, n, n_groups)?))
    })?;
    Ok((matrix(py, grid::to_signed(codes, 4), [n, k])?, matrix(py, scales, [n, n_groups])?))
}

#[pyfunction]
#[pyo3(signature = (codes, threads = 0))]
pub(crate) fn w4_pack<'py>(
    py: Python<'py>,
    codes: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<Bound<'py, PyArray2<i32>>> {
    let codes = Codes::take(codes)?;
    let [n, k] = codes.shape();
    let (strips, words) = w4::shape(n, k).map_err(|e| raise(py, &e))?;
    let flat = codes.biased(4, 8)?;
    let packed = allow_threads(py, |cancel| w4::pack(&flat?, n, k, &Execution { threads, cancel }))?;
    matrix(py, as_i32(packed), [strips, words])
}

#[pyfunction]
#[pyo3(signature = (packed, in_features, threads = 0))]
pub(crate) fn w4_unpack<'py>(
    py: Python<'py>,
    packed: &Bound<'py, PyAny>,
    in_features: usize,
    threads: usize,
) -> PyResult<Bound<'py, PyArray2<i8>>> {
    let packed = Matrix::take("packed", packed)?;
    let [strips, _] = packed.shape();
    let n = strips.saturating_mul(w4::STRIP);
    let (_, expected) = w4::shape(n, in_features).map_err(|e| raise(py, &e))?;
    packed.check_shape(py, "packed codes", [strips, expected])?;
    let words = as_u32(packed.values()?);
    let codes = allow_threads(py, |cancel| {
        let codes = w4::unpack(words, n, in_features, &Execution { threads, cancel })?;
        Ok(grid::to_signed(codes, 4))
    })?;
    matrix(py, codes, [n, in_features])
}
