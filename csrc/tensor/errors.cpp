#include "tensor/errors.h"

#include <c10/util/Exception.h>

#include "base/error.h"

namespace lowcomm {
namespace {

template <class E>
std::exception_ptr make(const std::string& what) {
  return std::make_exception_ptr(E({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, what));
}

}  // namespace

std::exception_ptr asTorchError(std::exception_ptr error) {
  if (!error) return error;
  try {
    std::rethrow_exception(error);
  } catch (const ValueError& e) {
    return make<c10::ValueError>(e.what());
  } catch (const TypeError& e) {
    return make<c10::TypeError>(e.what());
  } catch (const PeerError& e) {
    return make<c10::DistBackendError>(e.what());
  } catch (const WireError& e) {
    return make<c10::DistBackendError>(e.what());
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr asInnerError(std::exception_ptr error, const std::string& context,
                                const std::function<std::string(const std::string& message, bool fault)>& ending) {
  if (!error) return error;
  const auto lost = [&](const std::string& why, bool fault) {
    const std::string message = context + ": " + why;
    return make<c10::DistBackendError>(ending ? message + ending(message, fault) : message);
  };
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError&) {
    return std::current_exception();
  } catch (const c10::TypeError&) {
    return std::current_exception();
  } catch (const c10::IndexError&) {
    return std::current_exception();
  } catch (const c10::NotImplementedError&) {
    return std::current_exception();
  } catch (const c10::DistBackendError& e) {
    return std::current_exception();
  } catch (const c10::Error& e) {
    return lost(e.what_without_backtrace(), /*fault=*/false);
  } catch (const std::runtime_error& e) {
    return lost(e.what(), /*fault=*/true);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace lowcomm
