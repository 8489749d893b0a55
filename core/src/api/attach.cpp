#include "api/attach.h"

#include "gpu/gpu_group.h"
#include "ops/collectives.h"
#include "p2p/messenger.h"
#include "symm/table.h"

namespace phx {

std::vector<std::unique_ptr<Attachment>> attach_all(Group &group) {
  std::vector<std::unique_ptr<Attachment>> all;  // by AttachmentKind
  all.push_back(std::make_unique<SymmTable>(group, &cuda::Side::make));
  all.push_back(std::make_unique<GpuGroup>(group));
  all.push_back(std::make_unique<Messenger>(group));
  all.push_back(std::make_unique<Collectives>(group));
  return all;
}

}  // namespace phx
