// What lives on every group that is made through the C API.
#pragma once

#include "group/attachment.h"

namespace phx {

std::vector<std::unique_ptr<Attachment>> attach_all(Group &group);

}  // namespace phx
