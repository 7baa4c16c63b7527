//! Eigenvalues of a symmetric matrix.

use std::sync::mpsc::{sync_channel, RecvTimeoutError};
use std::time::Duration;

use faer::diag::Diag;
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::evd::{self, ComputeEigenvectors};
use faer::{MatRef, Par, Spec};

use crate::factor::Symmetric;
use crate::{Error, Execution, Result};

/// Parts that faer cuts its work into, whatever the number of threads: its sums depend on the parts, not on the threads.
const PARTS: usize = 4;

/// How often cancelling is looked for.
const TICK: Duration = Duration::from_millis(100);

/// All eigenvalues, ascending, in double precision. Reads the upper triangle.
///
/// The library cannot be interrupted. A cancelled call returns at once all the same; what it began runs to its end on
/// a copy of its own and is thrown away.
pub fn eigvalsh(h: Symmetric<'_>, execution: &Execution<'_>) -> Result<Vec<f64>> {
    let dim = h.dim();
    h.check_finite()?;
    if dim == 0 {
        return Ok(Vec::new());
    }
    let values = h.to_f64("a copy of the matrix whose eigenvalues are asked for")?;
    let pool = execution.pool()?;
    let (sender, receiver) = sync_channel(1);
    let work = move || {
        // Nobody listens any more after a cancelled call.
        let _ = sender.send(pool.install(|| eigenvalues(&values, dim)));
    };
    let worker = std::thread::Builder::new()
        .spawn(work)
        .map_err(|e| Error::Threads { threads: 1, reason: e.to_string() })?;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(found) => return found,
            Err(RecvTimeoutError::Timeout) => execution.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                let said = worker.join().err().unwrap_or_else(|| Box::new(""));
                let text = said.downcast_ref::<String>().map(String::as_str);
                let reason = text.or_else(|| said.downcast_ref::<&str>().copied()).unwrap_or("it stopped");
                return Err(Error::EigenvalueLibrary { dim, reason: reason.to_string() });
            }
        }
    }
}

/// The library's scratch memory is asked for here, with an error to hand. What its matrix product takes for packing, some
/// last-level caches' worth, it asks for by itself; want of that ends the process.
fn eigenvalues(values: &[f64], dim: usize) -> Result<Vec<f64>> {
    let par = Par::rayon(PARTS);
    let size = evd::self_adjoint_evd_scratch::<f64>(dim, ComputeEigenvectors::No, par, Spec::default());
    let mut scratch = MemBuffer::try_new(size)
        .map_err(|_| Error::OutOfMemory { what: "the eigenvalues of a matrix", bytes: size.size_bytes() })?;
    let mut found = Diag::<f64>::zeros(dim);
    // Row-major upper is column-major lower, the triangle that is read.
    let matrix = MatRef::from_column_major_slice(values, dim, dim);
    let stack = MemStack::new(&mut scratch);
    evd::self_adjoint_evd(matrix, found.as_mut(), None, par, stack, Spec::default())
        .map_err(|_| Error::NoConvergence { dim })?;
    Ok(found.column_vector().iter().copied().collect())
}
