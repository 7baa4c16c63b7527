//! A looped decoder as one program.

use loopq_core::{Cancel, Error, Execution};
use loopq_cpu::runner::{
    Block, Factor, Kind, Matrix, Norm, Norms, Op, Program, Runner, Tokens, Transform, Values,
};
use numpy::{Ix2, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{writable, InputRows, Matrix as Array, Vector};
use crate::gil::{allow_threads, raise};
use crate::matmul::{precision_of, CpuLayout};

/// A weight as Python holds it.
struct Held {
    layout: Option<Py<CpuLayout>>,
    values: Py<PyAny>,
    bias: Option<Py<PyAny>>,
    /// Number of its input transform.
    transform: Option<usize>,
}

/// Blocks of an input transform: how many of a kind, and the factors of each, a matrix or a vector of divisors.
type Blocks<'py> = Vec<(usize, Vec<Bound<'py, PyAny>>)>;
/// A weight from Python: its layout (none for a plain matrix), its codes or numbers, its bias and its input transform.
type Given<'py> = (Option<Py<CpuLayout>>, Py<PyAny>, Option<Py<PyAny>>, Option<Blocks<'py>>);

/// Runs a looped decoder from its codes, with its own keys and values.
#[pyclass(module = "loopq._native")]
pub(crate) struct CpuRunner {
    runner: Runner,
    held: Vec<Held>,
    transforms: Vec<Transform>,
}

fn factor_of(py: Python<'_>, given: &Bound<'_, PyAny>) -> PyResult<Factor> {
    if given.downcast::<PyUntypedArray>().is_ok_and(|array| array.ndim() == 1) {
        return Factor::divisors(Vector::take("divisors", given)?.values()?).map_err(|e| raise(py, &e));
    }
    let matrix = Array::<f32>::take("a factor of an input transform", given)?;
    Factor::matrix(matrix.shape()[0], matrix.values()?).map_err(|e| raise(py, &e))
}

/// The number of a transform among those known, which it joins if it equals none of them.
fn number_of(py: Python<'_>, blocks: &Blocks<'_>, known: &mut Vec<Transform>) -> PyResult<usize> {
    let mut made = Vec::with_capacity(blocks.len());
    for (count, factors) in blocks {
        made.push((*count, factors.iter().map(|f| factor_of(py, f)).collect::<PyResult<_>>()?));
    }
    let transform = Transform::new(made).map_err(|e| raise(py, &e))?;
    Ok(known.iter().position(|other| *other == transform).unwrap_or_else(|| {
        known.push(transform);
        known.len() - 1
    }))
}

fn field<'py, T: FromPyObject<'py>>(of: &Bound<'py, PyDict>, name: &str) -> PyResult<T> {
    of.get_item(name)?.ok_or_else(|| PyTypeError::new_err(format!("a block lacks {name:?}")))?.extract()
}

fn block_of(of: &Bound<'_, PyDict>) -> PyResult<Block> {
    let norms: [[Option<usize>; 3]; 2] = field(of, "norms")?;
    Ok(Block {
        heads: field(of, "heads")?,
        kv_heads: field(of, "kv_heads")?,
        head: field(of, "head")?,
        neighbours: field(of, "neighbours")?,
        scale: field(of, "scale")?,
        qkv: field(of, "qkv")?,
        gates: field(of, "gates")?,
        qk_bias: field(of, "qk_bias")?,
        qk_norms: field(of, "qk_norms")?,
        out: field(of, "out")?,
        gate_up: field(of, "gate_up")?,
        down: field(of, "down")?,
        norms: norms.map(|[input, branch, stream]| Norms { input, branch, stream }),
    })
}

fn op_of(name: &str, number: usize) -> PyResult<Op> {
    Ok(match name {
        "block" => Op::Block(number),
        "norm" => Op::Norm(number),
        "keep" => Op::Keep(number),
        "take" => Op::Take(number),
        "add" => Op::Add(number),
        "start" => Op::Start,
        "adapter" => Op::Adapter(number),
        _ => return Err(PyTypeError::new_err(format!("no step of a program is called {name:?}"))),
    })
}

fn kind_of(name: &str) -> PyResult<Kind> {
    Ok(match name {
        "float32" => Kind::F32,
        "bfloat16" => Kind::Bf16,
        "int8" => Kind::Eight,
        "int4" => Kind::Four,
        _ => return Err(PyTypeError::new_err(format!("keys and values are not kept as {name:?}"))),
    })
}

#[pymethods]
impl CpuRunner {
    #[new]
    #[pyo3(signature = (weights, norms, blocks, order, head, *, precision, kept))]
    fn new(
        py: Python<'_>,
        weights: Vec<Given<'_>>,
        norms: Vec<(Vec<f32>, f32)>,
        blocks: Vec<Bound<'_, PyDict>>,
        order: Vec<(String, usize)>,
        head: usize,
        precision: &str,
        kept: &str,
    ) -> PyResult<Self> {
        let mut held = Vec::with_capacity(weights.len());
        let mut shapes = Vec::with_capacity(weights.len());
        let mut transforms = Vec::new();
        for (layout, values, bias, blocks) in weights {
            shapes.push(match &layout {
                Some(layout) => layout.get().inner.shape(),
                None => InputRows::take(values.bind(py))?.shape(),
            });
            let transform = blocks.map(|blocks| number_of(py, &blocks, &mut transforms)).transpose()?;
            held.push(Held { layout, values, bias, transform });
        }
        let width = shapes.get(head).map_or(0, |&[_, inputs]| inputs);
        let program = Program {
            width,
            shapes,
            norms: norms.into_iter().map(|(weight, epsilon)| Norm { weight, epsilon }).collect(),
            blocks: blocks.iter().map(block_of).collect::<PyResult<_>>()?,
            order: order.iter().map(|(name, number)| op_of(name, *number)).collect::<PyResult<_>>()?,
            head,
            precision: precision_of(precision).map_err(|e| raise(py, &e))?,
            kept: kind_of(kept)?,
        };
        let runner = Runner::new(program).map_err(|e| raise(py, &e))?;
        Ok(Self { runner, held, transforms })
    }

    /// Number of tokens with stored keys and values.
    #[getter]
    fn seen(slf: &Bound<'_, Self>) -> PyResult<usize> {
        match slf.try_borrow() {
            Ok(own) => Ok(own.runner.seen()),
            Err(_) => Err(raise(slf.py(), &Error::RunnerInUse)),
        }
    }

    /// Forgets all tokens.
    fn restart(slf: &Bound<'_, Self>) -> PyResult<()> {
        alone(slf)?.runner.restart();
        Ok(())
    }

    /// The call of one token is short and looks for no signals.
    #[pyo3(signature = (x, angles, logits, start = None, *, threads = 0))]
    fn run(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        angles: &Bound<'_, PyAny>,
        logits: &Bound<'_, PyAny>,
        start: Option<&Bound<'_, PyAny>>,
        threads: usize,
    ) -> PyResult<()> {
        let own = &mut *alone(slf)?;
        let one_token = x.len()? == 1;
        let (x, angles) = (Array::<f32>::take("x", x)?, Array::<f32>::take("angles", angles)?);
        let start = start.map(|s| Array::<f32>::take("start", s)).transpose()?;
        let Some(mut logits) = writable::<f32, Ix2>(logits) else {
            return Err(PyTypeError::new_err("logits must be a writable, contiguous matrix of float32"));
        };
        let taken: Vec<_> = own.held.iter().map(|held| Taken::of(py, held)).collect::<PyResult<_>>()?;
        let mut matrices: Vec<_> = taken.iter().map(Taken::matrix).collect::<PyResult<_>>()?;
        for (matrix, held) in matrices.iter_mut().zip(&own.held) {
            matrix.transform = held.transform.map(|i| &own.transforms[i]);
        }
        let tokens = Tokens {
            x: x.values()?,
            start: start.as_ref().map(Array::values).transpose()?,
            angles: angles.values()?,
        };
        let (runner, logits) = (&mut own.runner, logits.as_slice_mut()?);
        let mut work =
            |cancel: &Cancel| runner.run(&matrices, &tokens, logits, &Execution { threads, cancel });
        if one_token {
            return py.detach(|| work(&Cancel::new())).map_err(|e: Error| raise(py, &e));
        }
        allow_threads(py, work)
    }
}

/// The runner for this call alone.
fn alone<'py>(runner: &Bound<'py, CpuRunner>) -> PyResult<PyRefMut<'py, CpuRunner>> {
    runner.try_borrow_mut().map_err(|_| raise(runner.py(), &Error::RunnerInUse))
}

/// A weight's arrays, borrowed for a call.
struct Taken<'py> {
    layout: Option<&'py CpuLayout>,
    codes: Option<Vector<'py, u8>>,
    rows: Option<InputRows<'py>>,
    bias: Option<Vector<'py, f32>>,
}

impl<'py> Taken<'py> {
    fn of(py: Python<'py>, held: &'py Held) -> PyResult<Self> {
        let values = held.values.bind(py);
        let bias = held.bias.as_ref().map(|b| Vector::take("bias", b.bind(py))).transpose()?;
        Ok(match &held.layout {
            Some(layout) => {
                let codes = Some(Vector::take("codes", values)?);
                Self { layout: Some(layout.get()), codes, rows: None, bias }
            }
            None => Self { layout: None, codes: None, rows: Some(InputRows::take(values)?), bias },
        })
    }

    fn matrix(&self) -> PyResult<Matrix<'_>> {
        let values = match (self.layout, &self.codes, &self.rows) {
            (Some(layout), Some(codes), _) => Values::Codes(&layout.inner, codes.values()?),
            (_, _, Some(InputRows::F32(rows))) => Values::F32(rows.values()?),
            (_, _, Some(InputRows::Bf16(rows))) => Values::Bf16(rows.values()?),
            _ => {
                return Err(PyTypeError::new_err(
                    "weights are codes, float32 or uint16 (bfloat16 bits); got float16",
                ))
            }
        };
        Ok(Matrix { values, bias: self.bias.as_ref().map(Vector::values).transpose()?, transform: None })
    }
}
