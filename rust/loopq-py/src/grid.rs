//! Grids, and what has no Hessian: rounding to nearest, codes to values.

use loopq_core::grid::{self, Quantized, ScaleType, Search, Table, Trellis, Units, Values};
use loopq_core::{Error, Execution};
use numpy::PyArray2;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{matrix, Codes, Matrix, Vector};
use crate::gil::{allow_threads, raise};

/// The codes and their values (`loopq.layers.grid.Grid.core`).
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct Grid {
    pub(crate) inner: grid::Grid,
}

#[pymethods]
impl Grid {
    #[new]
    #[pyo3(signature = (*, bits, group_size, symmetric = true, signed = false, scale_dtype = "float32",
                        scale_bits = None, scale_exponent = 0, scale_search = "max", trellis = None,
                        levels = None, units = None))]
    #[expect(clippy::too_many_arguments)] // keywords of a Python class, each a field of the core's
    fn new(
        py: Python<'_>,
        bits: u32,
        group_size: i64,
        symmetric: bool,
        signed: bool,
        scale_dtype: &str,
        scale_bits: Option<u32>,
        scale_exponent: i32,
        scale_search: &str,
        trellis: Option<(u32, usize)>,
        levels: Option<Vec<i8>>,
        units: Option<(usize, (i16, i16), i16, u8)>,
    ) -> PyResult<Self> {
        let read = || -> Result<grid::Grid, Error> {
            let values = match (trellis, levels) {
                (Some((state, rows)), _) => Values::Trellis(Trellis::new(bits, state, rows)?),
                (None, Some(levels)) => Values::Table(Table::new(&levels)?),
                (None, None) => Values::Even,
            };
            let scale_type = match units {
                Some((groups, scales, offsets, parts)) => {
                    ScaleType::Units(Units::new(groups, scales, offsets, parts)?)
                }
                None => ScaleType::parse(scale_dtype, scale_bits, scale_exponent)?,
            };
            let found = grid::Grid {
                bits,
                group_size: columns_per_scale(group_size)?,
                symmetric,
                signed,
                scale_type,
                search: Search::parse(scale_search)?,
                values,
            };
            found.check()?;
            Ok(found)
        };
        Ok(Self { inner: read().map_err(|e| raise(py, &e))? })
    }
}

/// Columns per scale as the core counts them: 0 where Python says -1, one scale for the whole row.
fn columns_per_scale(group_size: i64) -> Result<usize, Error> {
    match group_size {
        -1 => Ok(0),
        1.. => Ok(usize::try_from(group_size).unwrap_or(usize::MAX)),
        _ => Err(Error::Setting {
            name: "group_size",
            got: group_size.to_string(),
            allowed: "1 or more, or -1 for one scale per row".to_string(),
        }),
    }
}

/// Codes, scales and zeros as arrays: int8 signed codes of a symmetric grid, uint8 codes of an asymmetric one. Offsets take
/// the place of zeros.
pub(crate) fn result<'py>(
    py: Python<'py>,
    out: Quantized,
    grid: &grid::Grid,
    rows: usize,
    dim: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let n_groups = grid.n_groups(dim);
    let made = |e: Error| raise(py, &e);
    dict.set_item("scales", matrix(py, out.scales().map_err(made)?, [rows, n_groups])?)?;
    if grid.symmetric {
        dict.set_item("codes", matrix(py, grid::to_signed(out.codes, grid.bits), [rows, dim])?)?;
        dict.set_item("zeros", py.None())?;
    } else {
        if has_offsets(grid) {
            dict.set_item("zeros", matrix(py, out.offsets().map_err(made)?, [rows, n_groups])?)?;
        } else {
            dict.set_item("zeros", matrix(py, out.zeros().map_err(made)?, [rows, n_groups])?)?;
        }
        dict.set_item("codes", matrix(py, out.codes, [rows, dim])?)?;
    }
    Ok(dict)
}

fn has_offsets(grid: &grid::Grid) -> bool {
    grid.units().is_some_and(|units| units.has_offsets())
}

#[pyfunction]
#[pyo3(signature = (w, grid, *, threads = 0))]
pub(crate) fn rtn<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    grid: &Bound<'py, Grid>,
    threads: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let grid = &grid.get().inner;
    let w = Matrix::take("w", w)?;
    let weight = w.weight(py, "W")?;
    let out = allow_threads(py, |cancel| grid::rtn(weight, grid, &Execution { threads, cancel }))?;
    result(py, out, grid, weight.rows(), weight.dim())
}

#[pyfunction]
#[pyo3(signature = (w, weights, grid, *, threads = 0))]
pub(crate) fn fit_levels(
    py: Python<'_>,
    w: &Bound<'_, PyAny>,
    weights: &Bound<'_, PyAny>,
    grid: &Bound<'_, Grid>,
    threads: usize,
) -> PyResult<Vec<i8>> {
    let grid = &grid.get().inner;
    let (w, weights) = (Matrix::take("w", w)?, Vector::take("weights", weights)?);
    let (weight, weights) = (w.weight(py, "W")?, weights.values()?);
    let table =
        allow_threads(py, |cancel| grid::fitted(weight, weights, grid, &Execution { threads, cancel }))?;
    Ok(table.bytes()[..table.len()].to_vec())
}

#[pyfunction]
#[pyo3(signature = (codes, scales, zeros, grid))]
pub(crate) fn dequantize<'py>(
    py: Python<'py>,
    codes: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
    zeros: Option<&Bound<'py, PyAny>>,
    grid: &Bound<'py, Grid>,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let grid = &grid.get().inner;
    let (codes, scales) = (Codes::take(codes)?, Matrix::take("scales", scales)?);
    let [rows, dim] = codes.shape();
    let (group, levels) = (grid.group(dim), [rows, grid.n_groups(dim)]);
    if let (Codes::Biased(codes), Some(offsets), true) = (&codes, zeros, has_offsets(grid)) {
        let offsets: Matrix<'_, f32> = Matrix::take("zeros", offsets)?;
        scales.check_shape(py, "scales", levels)?;
        offsets.check_shape(py, "zeros", levels)?;
        let (codes, scales, offsets) = (codes.values()?, scales.values()?, offsets.values()?);
        let values = allow_threads(py, |_| {
            let mut values = grid::dequantize(codes, f32::from, scales, None, rows, dim, group)?;
            grid::add_offsets(&mut values, offsets, rows, dim, group)?;
            Ok(values)
        })?;
        return matrix(py, values, [rows, dim]);
    }
    let zeros = zeros.map(|zeros| Matrix::take("zeros", zeros)).transpose()?;
    scales.check_shape(py, "scales", levels)?;
    let scales = scales.values()?;
    let values = match (&codes, &zeros, grid.values) {
        (codes, None, Values::Table(table)) => {
            let flat = codes.biased(grid.bits, i64::from(grid.middle()))?;
            let step = |code| table.level(code);
            allow_threads(py, |_| grid::dequantize(&flat?, step, scales, None, rows, dim, group))
        }
        (codes, None, Values::Trellis(trellis)) => {
            let flat = codes.biased(grid.bits, i64::from(grid.middle()))?;
            allow_threads(py, |_| grid::decode(trellis, &flat?, scales, [rows, dim], group))
        }
        (Codes::Signed(codes), None, Values::Even) => {
            let codes = codes.values()?;
            allow_threads(py, |_| grid::dequantize(codes, f32::from, scales, None, rows, dim, group))
        }
        (Codes::Biased(codes), Some(zeros), Values::Even) => {
            zeros.check_shape(py, "zeros", levels)?;
            let (codes, zeros) = (codes.values()?, zeros.values()?);
            allow_threads(py, |_| grid::dequantize(codes, f32::from, scales, Some(zeros), rows, dim, group))
        }
        (_, Some(_), Values::Table(_) | Values::Trellis(_)) => {
            Err(PyTypeError::new_err("codes on a trellis or of a table take no zeros"))
        }
        (Codes::Signed(_), Some(_), Values::Even) => {
            Err(PyTypeError::new_err("signed (int8) codes take no zeros"))
        }
        (Codes::Biased(_), None, Values::Even) => {
            Err(PyTypeError::new_err("biased (uint8) codes need zeros"))
        }
    }?;
    matrix(py, values, [rows, dim])
}
